//! How far a long command is.

use std::io::IsTerminal as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines of [`Steps`] where there is no terminal.
const QUIET: Duration = Duration::from_secs(10);

/// Weights: a bar on a terminal, lines elsewhere.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    quiet: bool,
    total: u64,
    /// Done by this run.
    done: AtomicU64,
    /// Done before.
    skipped: AtomicU64,
    start: Instant,
}

impl Progress {
    /// Of a number of weights; `quiet` shows nothing.
    pub(crate) fn new(total: u64, quiet: bool) -> Self {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            if let Ok(style) = ProgressStyle::with_template(
                "{bar:30} {percent:>3}% {human_pos} of {human_len} weights, {per_sec}, {eta} left",
            ) {
                bar.set_style(style);
            }
            bar
        });
        let (done, skipped) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { bar, quiet, total, done, skipped, start: Instant::now() }
    }

    /// Some weights are done.
    pub(crate) fn advance(&self, n: u64) {
        self.done.fetch_add(n, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(n);
        }
    }

    /// Some weights were done before this run.
    pub(crate) fn skip(&self, n: u64) {
        self.skipped.fetch_add(n, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            // Not at this run's rate.
            bar.inc(n);
            bar.reset_eta();
        }
    }

    /// A line above the bar; without one, with how far the whole is.
    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None if !self.quiet => eprintln!("{text} ({})", self.state()),
            None => {}
        }
    }

    fn state(&self) -> String {
        let (done, skipped) = (self.done.load(Ordering::Relaxed), self.skipped.load(Ordering::Relaxed));
        let rate = done as f64 / self.start.elapsed().as_secs_f64().max(1e-3);
        let share = (done + skipped) as f64 / self.total.max(1) as f64;
        let left = self.total.saturating_sub(done + skipped) as f64 / rate.max(1.0);
        format!("{:.0} %, {:.2} M weights/s, {left:.0} s left", share * 100.0, rate / 1e6)
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Steps of a kind: a bar on a terminal, a line now and then elsewhere.
pub(crate) struct Steps {
    bar: Option<ProgressBar>,
    what: &'static str,
    total: usize,
    done: usize,
    started: Instant,
    said: Instant,
}

impl Steps {
    /// Of `total` steps, called `what`.
    pub(crate) fn new(what: &'static str, total: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            let template = format!("{{bar:30}} {{percent:>3}}% {{pos}} of {{len}} {what}, {{eta}} left");
            if let Ok(style) = ProgressStyle::with_template(&template) {
                bar.set_style(style);
            }
            bar
        });
        let now = Instant::now();
        Self { bar, what, total, done: 0, started: now, said: now }
    }

    /// One step is done.
    pub(crate) fn step(&mut self) {
        self.done += 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        } else if self.said.elapsed() >= QUIET && self.done < self.total {
            self.said = Instant::now();
            let left =
                self.started.elapsed().as_secs_f64() / self.done as f64 * (self.total - self.done) as f64;
            eprintln!("{} of {} {}, {left:.0} s left", self.done, self.total, self.what);
        }
    }

    /// Takes the bar away.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
