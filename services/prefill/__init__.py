"""The service that computes prompts."""
