"""The prefill service computes prompts."""
