// Before anything is drawn: the theme that was chosen here, if one was. Light or dark otherwise as the system has it.
try {
  const theme = localStorage.getItem("isthmus.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is forbidden: the system's theme.
}
