"""The slim reinforcement-learning trainer that composes the tidemill packages."""
