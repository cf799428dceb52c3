"""What tests of many folders stand on: gates, objects of a state, rows of tables, and comparison bit for bit."""
