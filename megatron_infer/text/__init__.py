"""Text at the edges: ids to text and back, stop strings, chat templates."""
