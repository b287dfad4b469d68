"""Tracking: what became of every request and every batch, kept in SQLite or PostgreSQL for questions afterwards."""
