"""Builds and checks a release."""
