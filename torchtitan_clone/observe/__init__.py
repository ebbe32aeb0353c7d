"""What a run shows and writes about itself: log lines, metrics, traces; the room just above config."""
