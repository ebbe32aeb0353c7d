"""What ties the packages together into one run, one noun a file."""
