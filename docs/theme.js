// Players in frames have the theme of the site: at first, and whenever it is switched.
//
// Opened as files, a page and its frames may not look into each other; messages pass.

(() => {
  const theme = () => (document.body.dataset.mdColorScheme === "slate" ? "dark" : "light");
  const tell = () => {
    for (const frame of document.querySelectorAll("iframe.schedule")) {
      frame.contentWindow?.postMessage({ unisonoTheme: theme() }, "*");
    }
  };
  const start = () => {
    new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    // A frame that is loaded later asks.
    addEventListener("message", (event) => {
      if (event.data === "unisono theme?") tell();
    });
    tell();
  };
  if (document.body) start();
  else addEventListener("DOMContentLoaded", start);
})();
