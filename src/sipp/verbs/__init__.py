"""What a user asks for: one file a public function, named like it."""
