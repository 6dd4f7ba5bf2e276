"""Tokenisers: trained here, or read from the formats that others publish."""
