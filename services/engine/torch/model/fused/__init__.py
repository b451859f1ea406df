"""This package fuses small operations of a definition on a GPU; it recognizes them by what they compute."""
