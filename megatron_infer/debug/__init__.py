"""Tools for finding out what happened: recording and replaying runs."""
