"""ACCURACY: does a model still answer right? Tasks, both arms side by side in vLLM, and other people's model code."""
