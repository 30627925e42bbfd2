"""What test modules share. They import from here, and never from each other."""
