// What tests ask of a page, from inside it.

window.probe = {
  // The letters in every cell of the grid, row by row.
  cells(stage = 0) {
    const grid = document.querySelectorAll(".panel.grid")[stage];
    const found = [];
    for (const frame of grid.querySelectorAll("rect.cell")) {
      const letters = [...frame.parentNode.querySelectorAll(".letter")].map((t) => t.textContent);
      const tick = frame.parentNode.querySelector(".tick:not(.none)");
      found.push([letters.join(""), frame.classList.contains("fresh"), Boolean(tick)]);
    }
    return found;
  },

  scrub(at) {
    const slider = document.querySelector(".scrub");
    slider.value = at;
    slider.dispatchEvent(new Event("input", { bubbles: true }));
    return Number(document.querySelector("[data-at]").dataset.at);
  },

  // Every visible text with less contrast than asked for, against what is behind it.
  faint(least) {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const over = (top, below, opacity) => top.slice(0, 3).map((c, i) => c * opacity + below[i] * (1 - opacity));
    const luminance = (rgb) => {
      const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const contrast = (a, b) => {
      const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
      return (light + 0.05) / (dark + 0.05);
    };
    const seen = [];
    let count = 0;
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode;
      const owner = text.parentElement;
      if (!text.data.trim() || owner.closest("script, style, option")) continue;
      const range = document.createRange();
      range.selectNodeContents(text);
      const box = range.getBoundingClientRect();
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      const hit = document.elementsFromPoint(x, y);
      if (!box.width || !hit.includes(owner)) continue;
      const look = getComputedStyle(owner);
      const ink = rgba(owner instanceof SVGElement ? look.fill : look.color);
      const behind = hit.slice(hit.indexOf(owner) + (owner instanceof SVGElement ? 1 : 0));
      let back = rgba(getComputedStyle(document.body).backgroundColor);
      for (const element of behind.reverse()) {
        const style = getComputedStyle(element);
        const svg = element instanceof SVGGeometryElement;
        const colour = rgba(svg ? style.fill : style.backgroundColor);
        back = over(colour, back, (colour[3] / 255) * Number(style.opacity));
      }
      count += 1;
      const found = contrast(ink.slice(0, 3), back);
      if (found < least) seen.push([text.data.trim(), Number(found.toFixed(2)), owner.className.baseVal ?? owner.className]);
    }
    return { count, seen };
  },

  // How much two pictures differ, seen from so far away that fonts do not matter.
  async differ(one, other) {
    const [width, height] = [48, 36];
    const pixels = async (data) => {
      const picture = new Image();
      picture.src = `data:image/png;base64,${data}`;
      await picture.decode();
      const canvas = new OffscreenCanvas(width, height).getContext("2d");
      canvas.imageSmoothingQuality = "high";
      canvas.drawImage(picture, 0, 0, width, height);
      return canvas.getImageData(0, 0, width, height).data;
    };
    const [a, b] = [await pixels(one), await pixels(other)];
    let sum = 0;
    for (let i = 0; i < a.length; i += 1) sum += Math.abs(a[i] - b[i]);
    return sum / (width * height * 3);
  },
};
