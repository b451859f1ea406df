// Draws one dashboard with Grafana's own panels: its JSON, and what Prometheus answered, from BOARD.json.
// When everything is drawn the page's title is "drawn", and each panel says how many series it shows.
import {
  createTheme,
  DataFrame,
  dateTime,
  EventBusSrv,
  FieldType,
  getDisplayProcessor,
  getFieldDisplayValues,
  ThemeContext,
  TimeRange,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries } from "@grafana/ui";
import { useEffect } from "react";
import { createRoot } from "react-dom/client";

interface Series {
  name: string;
  values: Array<[number, number | null]>; // seconds
}
interface Answer {
  dashboard: any;
  from: number;
  to: number;
  step: number;
  panels: Record<string, Series[]>; // by the panel's id
}

const theme = createTheme({ colors: { mode: "light" } });
const COLUMN = 60;
const ROW = 30;
const eventBus = new EventBusSrv();

function rangeOf(series: Series) {
  const values = series.values.map(([, value]) => value).filter((value) => value !== null);
  const [min, max] = [Math.min(...values), Math.max(...values)];
  return { min, max, delta: max - min };
}

function overridden(panel: any, name: string) {
  const ours = (panel.fieldConfig.overrides ?? []).filter(
    (override: any) => override.matcher.id === "byName" && override.matcher.options === name,
  );
  return Object.fromEntries(
    ours.flatMap((override: any) => override.properties.map((one: any) => [one.id, one.value])),
  );
}

function framesOf(panel: any, series: Series[]): DataFrame[] {
  return series.map((one, seriesIndex) => {
    // What the panels' plugins have as their defaults.
    const config = {
      color: { mode: panel.type === "stat" ? "thresholds" : "palette-classic" },
      ...panel.fieldConfig.defaults,
      ...overridden(panel, one.name),
      displayNameFromDS: one.name,
    };
    const value: any = {
      name: "Value",
      type: FieldType.number,
      config,
      values: one.values.map(([, v]) => v),
      state: { seriesIndex, displayName: one.name, range: rangeOf(one) },
    };
    value.display = getDisplayProcessor({ field: value, theme, timeZone: "utc" });
    const time: any = {
      name: "Time",
      type: FieldType.time,
      config: {},
      values: one.values.map(([t]) => t * 1000),
    };
    time.display = getDisplayProcessor({ field: time, theme, timeZone: "utc" });
    return { name: one.name, refId: one.name, length: one.values.length, fields: [time, value] };
  });
}

function Graph({ panel, series, timeRange, width, height }: any) {
  return (
    <TimeSeries
      frames={framesOf(panel, series)}
      timeRange={timeRange}
      timeZone="utc"
      width={width}
      height={height}
      legend={panel.options.legend}
      options={panel.options}
    />
  );
}

function Tile({ panel, series, width, height }: any) {
  const values = getFieldDisplayValues({
    data: framesOf(panel, series),
    reduceOptions: panel.options.reduceOptions,
    fieldConfig: panel.fieldConfig,
    replaceVariables: (text: string) => text,
    theme,
    timeZone: "utc",
    sparkline: true,
  });
  const [first] = values;
  return (
    <BigValue
      value={{ ...first.display, title: "" }}
      sparkline={panel.options.graphMode === "area" ? first.sparkline : undefined}
      colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode}
      justifyMode={panel.options.justifyMode}
      theme={theme}
      width={width}
      height={height}
    />
  );
}

function Panel({ panel, answer, timeRange }: { panel: any; answer: Answer; timeRange: TimeRange }) {
  const { x, y, w, h } = panel.gridPos;
  const box = { position: "absolute" as const, left: x * COLUMN + 8, top: y * ROW + 8 };
  const [width, height] = [w * COLUMN - 8, h * ROW - 8];
  if (panel.type === "row") {
    return <div style={{ ...box, font: "500 18px sans-serif", paddingTop: 2 }}>{panel.title}</div>;
  }
  const series = answer.panels[panel.id];
  const Drawn = panel.type === "stat" ? Tile : Graph;
  return (
    <div style={box} className="drawn-panel" data-title={panel.title} data-series={series.length}>
      <PanelChrome title={panel.title} width={width} height={height}>
        {(innerWidth, innerHeight) => (
          <Drawn {...{ panel, series, timeRange }} width={innerWidth} height={innerHeight} />
        )}
      </PanelChrome>
    </div>
  );
}

function Board({ answer }: { answer: Answer }) {
  const { panels } = answer.dashboard;
  const rows = Math.max(...panels.map((panel: any) => panel.gridPos.y + panel.gridPos.h));
  const [from, to] = [dateTime(answer.from * 1000), dateTime(answer.to * 1000)];
  const timeRange = { from, to, raw: { from, to } };
  useEffect(() => {
    document.title = "drawn";
  }, []);
  const style = { position: "relative" as const, width: 24 * COLUMN + 8, height: rows * ROW + 16 };
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <PanelContextProvider value={{ eventsScope: "page", eventBus }}>
        <div id="board" style={style}>
          {panels.map((panel: any) => (
            <Panel key={panel.id} {...{ panel, answer, timeRange }} />
          ))}
        </div>
      </PanelContextProvider>
    </ThemeContext.Provider>
  );
}

const board = new URLSearchParams(location.search).get("board");
const answer: Answer = await (await fetch(`${board}.json`)).json();
createRoot(document.getElementById("root")!).render(<Board answer={answer} />);
