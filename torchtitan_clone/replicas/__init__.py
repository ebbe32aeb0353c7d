"""What the trainer knows of other replica groups, and watchdogs for hangs."""
