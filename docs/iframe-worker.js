// The search of the site runs in a Worker. Browsers refuse a Worker to a page that is opened from
// the disk; an iframe without a page of its own does the same there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.url = new URL(url, location.href)
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      const load = source =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script")
          script.src = new URL(source, this.url)
          script.onload = resolve
          script.onerror = () => reject(new Error(`cannot load ${source}`))
          inside.document.head.append(script)
        })
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve())
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.ready = load(this.url)
    }
    postMessage(data) {
      this.ready.then(() => {
        const event = new MessageEvent("message", { data })
        this.inside.dispatchEvent(event)
      })
    }
    terminate() {}
  }
  // The switch of languages asks for the map of the site, which browsers refuse from the disk too.
  const open = XMLHttpRequest.prototype.open
  XMLHttpRequest.prototype.open = function (method, url, ...more) {
    const isMap = String(url).endsWith("sitemap.xml")
    return open.call(this, method, isMap ? "data:application/xml,<urlset/>" : url, ...more)
  }
}
