"""Which sample comes when: computed orders, a resumable sampler, blends of datasets."""
