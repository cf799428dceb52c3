"""What is seen of a checkpoint directory: one page of HTML that needs nothing else, once or live."""
