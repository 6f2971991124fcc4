"""One file an op: the public function, its argument checks and its float64 reference."""
