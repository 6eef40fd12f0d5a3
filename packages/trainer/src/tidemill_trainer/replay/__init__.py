"""The command `tidemill replay`: repeat recorded steps of a run and compare the weights bit for bit."""
