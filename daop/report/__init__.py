"""What a person reads afterwards: tables and pictures."""
