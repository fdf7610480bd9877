"""What `launch.py` runs, by what it tests."""
