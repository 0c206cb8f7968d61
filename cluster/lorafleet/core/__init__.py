"""The floor every layer stands on: names, errors, paths. Imports nothing of ours."""
