// The demo's control panel; there is none elsewhere.

export class Demo {
  constructor(panel) { this.panel = panel; }
  tell(event) { this.panel.hidden = !event.demo; }
  draw() {}
}
