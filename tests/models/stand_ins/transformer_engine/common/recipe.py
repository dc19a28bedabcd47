class DelayedScaling:
    def __init__(self, **options):
        self.options = options
