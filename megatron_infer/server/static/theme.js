"use strict";
// Runs before the page is drawn, so that it never shows in other colours first. All that is kept is the choice.

const THEMES = ["system", "light", "dark"];

function chosenTheme() {
  try {
    const kept = localStorage.getItem("theme");
    return THEMES.includes(kept) ? kept : "system";
  } catch {
    return "system"; // the browser keeps nothing for this page
  }
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("theme", theme);
  } catch {
    // it holds until the page is left
  }
}

document.documentElement.dataset.theme = chosenTheme();
document.addEventListener("DOMContentLoaded", () => {
  const choice = document.getElementById("theme");
  choice.value = chosenTheme();
  choice.addEventListener("change", () => chooseTheme(choice.value));
});
