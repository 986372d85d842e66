// Chats through Open WebUI in Chromium: `node open_webui.mjs` in a folder with playwright-core.
//
// Before: `sirchat serve -m smollm2 --port 8080`, and in an environment with open-webui
// `OPENAI_API_BASE_URL=http://127.0.0.1:8080/v1 ENABLE_OLLAMA_API=false open-webui serve --port 8092`.

import { createRequire } from "node:module";

const { chromium } = createRequire(`${process.cwd()}/`)("playwright-core");
const PAGE = "http://127.0.0.1:8092";
const ASKED = ["My name is Anna. What is the capital of France?", "What is my name?"];
const user = { name: "Anna", email: "anna@example.com", password: "Anna-and-1-word" };

async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return fetch(PAGE + path, { method: "POST", headers, body: JSON.stringify(body) });
}

let signed = await post("/api/v1/auths/signup", { ...user, profile_image_url: "" });
if (!signed.ok) signed = await post("/api/v1/auths/signin", user);
const { token } = await signed.json();
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"],
});
const page = await browser.newPage({ viewport: { width: 1200, height: 800 } });
await page.goto(`${PAGE}/auth`);
await page.evaluate((found) => localStorage.setItem("token", found), token);
await page.goto(`${PAGE}/?models=smollm2`);
await page.waitForTimeout(8000);
const welcome = page.getByText("Okay, Let's Go!");
if (await welcome.count()) await welcome.first().click();
for (const text of ASKED) {
  await page.locator("#chat-input").click();
  await page.keyboard.type(text);
  await page.keyboard.press("Enter");
  await page.waitForTimeout(15000);
}
await page.screenshot({ path: "open_webui.png" });
console.log(await page.locator(".chat-assistant").allInnerTexts());
await browser.close();
