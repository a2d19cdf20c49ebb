"""What each kind of rule looks at: given the database, a rule and the time, what holds now."""
