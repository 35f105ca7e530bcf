// Clicks through the playground of the site in headless Chromium: desktop and phone, both languages.
//
//     make docs
//     npm install --no-save puppeteer-core
//     node scripts/docs/click_playground.js build/docs /usr/bin/chromium [FOLDER FOR PICTURES]
//
// It exits with an error if a page reports one, or does not do what a reader expects.
"use strict";

const assert = require("node:assert");
const path = require("node:path");
const puppeteer = require("puppeteer-core");

const [site, executablePath, pictures] = process.argv.slice(2);
const VIEWS = [
  ["index.html", 1280, 900, "desktop"], ["index.html", 390, 844, "phone"],
  ["zh/index.html", 1280, 900, "desktop-zh"], ["zh/index.html", 390, 844, "phone-zh"],
];
const SPANS = ".playground .text span";

async function visit(browser, [file, width, height, name]) {
  const page = await browser.newPage(), errors = [];
  page.on("pageerror", (error) => errors.push(error.message));
  await page.setViewport({ width, height });
  const written = (n) => page.waitForFunction((s, k) => document.querySelectorAll(s).length > k, {}, SPANS, n);
  const text = () => page.$eval(".playground .text", (x) => x.textContent);
  const status = () => page.$eval(".playground .status", (x) => x.textContent);

  const started = Date.now();
  await page.goto(`file://${path.resolve(site, file)}`);
  await written(12);
  const first = Date.now() - started;
  // While it writes, the text moves.
  await page.waitForFunction(() => !/Stop|停止/.test(document.querySelector(".playground button").textContent));
  // A line break has no place to click on.
  const before = await page.$$eval(SPANS, (spans) => spans.findIndex((x, i) => i > 50 && x.textContent.trim()));
  await page.click(`${SPANS}:nth-child(${before + 1})`);
  assert.match(await status(), new RegExp(`\\b${before}\\b`), "a chosen character says how many it looked at");
  if (pictures) await page.screenshot({ path: path.join(pictures, `${name}.png`) });

  const start = (await text()).slice(0, 100);
  await page.$eval(".playground [name=memory]", (x) => { x.value = 0; x.dispatchEvent(new Event("input")); });
  await written(150);
  assert.notStrictEqual((await text()).slice(0, 100), start, "without memory, another text");
  await page.$eval(".playground [name=memory]", (x) => { x.value = 2; x.dispatchEvent(new Event("input")); });
  await written(150);
  assert.strictEqual((await text()).slice(0, 100), start, "with the same seed, the same text");
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  assert.ok(wide <= 0, `the page is ${wide} pixels wider than the screen`);
  assert.deepStrictEqual(errors, []);
  console.log(`${name}: the first characters after ${first} ms`);
  await page.close();
}

(async () => {
  const browser = await puppeteer.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    for (const view of VIEWS) await visit(browser, view);
  } finally {
    await browser.close();
  }
})();
