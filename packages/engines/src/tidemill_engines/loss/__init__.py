"""The contract of a loss, its metrics, and the losses of this package. A new loss is a module here."""
