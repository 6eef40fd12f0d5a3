"""Control messages between trainer ranks and engine ranks: mailboxes, bucket descriptors, requests."""
