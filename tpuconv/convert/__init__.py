"""From safetensors to Orbax: table, source, plan, run, store, journal, manifest. Receives a family, imports none."""
