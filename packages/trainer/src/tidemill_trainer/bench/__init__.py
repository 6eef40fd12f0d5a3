"""The command `tidemill bench`: where the time of a step goes."""
