"""Options: `InferenceConfig`, sampling parameters, and the sizes and graph shapes that follow from them. No torch."""
