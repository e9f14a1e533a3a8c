"""Carries snapshots between stores."""
