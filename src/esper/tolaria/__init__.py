"""tolaria: execution -- trains many growing hosts side by side, and keeps them safe."""
