"""What a compressed cache is judged by: a context, a question, and what counts as right."""
