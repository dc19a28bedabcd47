"""Speech tokens to sound: blocks of an answer, audio decoders, voices, WAV files."""
