"""Model classes that transformers doesn't have: register them here. docs/make_it_yours.md says what a class needs."""
