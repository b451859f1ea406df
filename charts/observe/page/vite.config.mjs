import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  esbuild: { jsx: "automatic" },
  define: { "process.env.NODE_ENV": '"production"' },
  build: { target: "esnext", minify: false, outDir: "dist", chunkSizeWarningLimit: 1e5 },
});
