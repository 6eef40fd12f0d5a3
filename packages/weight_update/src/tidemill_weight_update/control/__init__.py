"""What trainer and engine ranks say to each other."""
