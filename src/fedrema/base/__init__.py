"""What every other package uses: files, random generators, memory, terminal text, code and files that users supply."""
