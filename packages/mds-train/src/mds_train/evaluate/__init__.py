"""Measures finished models: perplexity, LAMBADA, tasks of lm-evaluation-harness, BLEU."""
