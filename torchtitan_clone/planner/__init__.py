"""Predicts memory and time of a step on hardware that need not be here, and searches the fastest mesh."""
