"""What runs on the device: nothing here knows of autograd or of how it is launched."""
