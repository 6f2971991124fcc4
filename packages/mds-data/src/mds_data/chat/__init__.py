"""Chat templates of models, rendered by a small interpreter that can run no code."""
