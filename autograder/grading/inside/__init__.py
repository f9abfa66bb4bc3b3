"""What runs confined: the processes that hold a student's code or Programs, and what they are confined by."""
