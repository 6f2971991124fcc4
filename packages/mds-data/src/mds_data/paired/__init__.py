"""Documents made of parts (source and target, prompt and answer): read, filtered, written."""
