//! Tokens one after the other.

use mlx_rs::error::Exception;
use mlx_rs::ops::indexing::argmax;
use mlx_rs::{Array, transforms};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::cache::KvCache;
use crate::error::Error;
use crate::model::Model;

/// Tokens of a prompt that go through the model at a time, which bounds the memory of a long one.
pub const PREFILL_CHUNK: usize = 512;

/// How to draw a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// What logits are divided by: finite and above zero. At zero the most likely token is taken ([`Sampler::greedy`]).
    pub temperature: f32,
    /// Of the most likely tokens, only as many as together have this probability are drawn from: above zero, up to 1.
    pub top_p: f32,
    /// The same seed draws the same tokens from the same logits.
    pub seed: u64,
}

/// Picks tokens by their logits.
#[derive(Debug, Clone)]
pub struct Sampler(Option<(Sampling, SmallRng)>);

impl Sampler {
    /// Takes the most likely token, the first of equals.
    pub fn greedy() -> Self {
        Self(None)
    }

    /// Draws as `sampling` says.
    ///
    /// # Errors
    /// [`Error::Sampling`] for a parameter out of range.
    pub fn new(sampling: Sampling) -> Result<Self, Error> {
        let Sampling { temperature, top_p, seed } = sampling;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(Error::Sampling {
                what: "temperature",
                found: temperature,
                expected: "a finite number, zero or more",
            });
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::Sampling { what: "top_p", found: top_p, expected: "above 0, at most 1" });
        }
        Ok(Self((temperature > 0.0).then(|| (sampling, SmallRng::seed_from_u64(seed)))))
    }

    /// A token for logits `[vocab_size]` in float32, which it evaluates; `None` if they are NaN.
    ///
    /// # Errors
    /// An error of MLX's.
    pub fn pick(&mut self, logits: &Array) -> Result<Option<u32>, Error> {
        let Some((sampling, rng)) = &mut self.0 else {
            let token = argmax(logits, false)?;
            let greatest = logits.max(false)?;
            transforms::eval([&token, &greatest])?;
            let ordered = !greatest.try_item_exact::<f32>().map_err(unreadable)?.is_nan();
            return Ok(ordered.then_some(token.try_item_exact::<u32>().map_err(unreadable)?));
        };
        logits.eval()?;
        let logits: Vec<f32> = logits.to_vec_exact().map_err(unreadable)?;
        Ok(draw(&logits, *sampling, rng.random()))
    }
}

fn unreadable(error: impl std::fmt::Display) -> Exception {
    Exception::custom(error.to_string())
}

/// The token at `point`, from 0 to 1, of the cumulated probabilities, most likely first.
fn draw(logits: &[f32], sampling: Sampling, point: f64) -> Option<u32> {
    let greatest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if !greatest.is_finite() || logits.iter().any(|x| x.is_nan()) {
        return None;
    }
    let weight = |logit: f32| (f64::from(logit - greatest) / f64::from(sampling.temperature)).exp();
    let mut tokens: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|&l| weight(l))).collect();
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1));
    let total: f64 = tokens.iter().map(|t| t.1).sum();
    let mut kept = 0.0;
    let nucleus = tokens.iter().take_while(|t| {
        let more = kept < f64::from(sampling.top_p) * total;
        kept += if more { t.1 } else { 0.0 };
        more
    });
    let nucleus = nucleus.count().max(1);
    let mut left = point * kept;
    let drawn = tokens[..nucleus].iter().find(|t| {
        left -= t.1;
        left < 0.0
    });
    Some(drawn.unwrap_or(&tokens[nucleus - 1]).0)
}

/// Tokens that follow a prompt; ends at a stop token, which it does not yield, after the greatest number, or after an
/// error.
#[derive(Debug)]
pub struct Generation<'m> {
    model: &'m mut Model,
    cache: KvCache,
    sampler: Sampler,
    stop: Vec<u32>,
    left: usize,
    next: Next,
}

#[derive(Debug)]
enum Next {
    /// Logits are there to pick from.
    Pick(Array),
    /// This token has to go through the model first.
    Feed(u32),
    Done,
}

impl<'m> Generation<'m> {
    /// Takes `prompt` through the model, [`PREFILL_CHUNK`] tokens at a time, and computes it.
    ///
    /// # Errors
    /// [`Error::Tokens`] for an empty prompt or a token outside the vocabulary; an error of MLX's.
    pub fn new(
        model: &'m mut Model,
        prompt: &[u32],
        sampler: Sampler,
        stop: &[u32],
        max_tokens: usize,
    ) -> Result<Self, Error> {
        let mut cache = model.new_cache();
        let (before, last) = prompt.split_at(prompt.len().saturating_sub(1) / PREFILL_CHUNK * PREFILL_CHUNK);
        for chunk in before.chunks(PREFILL_CHUNK) {
            model.hidden(chunk, &mut cache)?;
            cache.eval()?;
        }
        let logits = model.next_logits(last, &mut cache)?;
        logits.eval()?;
        cache.eval()?;
        Ok(Self { model, cache, sampler, stop: stop.to_vec(), left: max_tokens, next: Next::Pick(logits) })
    }

    fn advance(&mut self) -> Result<Option<u32>, Error> {
        let logits = match std::mem::replace(&mut self.next, Next::Done) {
            _ if self.left == 0 => return Ok(None),
            Next::Done => return Ok(None),
            Next::Pick(logits) => logits,
            Next::Feed(token) => self.model.next_logits(&[token], &mut self.cache)?,
        };
        let position = self.cache.len();
        let token = self.sampler.pick(&logits)?.ok_or(Error::NotANumber { position })?;
        if self.stop.contains(&token) {
            return Ok(None);
        }
        self.left -= 1;
        self.next = Next::Feed(token);
        Ok(Some(token))
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<u32, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32, top_p: f32) -> Sampling {
        Sampling { temperature, top_p, seed: 7 }
    }

    #[test]
    fn draws_by_probability() {
        // Probabilities 0.2, 0.5, 0.3.
        let logits = [0.2f32.ln(), 0.5f32.ln(), 0.3f32.ln()];
        let at = |top_p, point| draw(&logits, sampling(1.0, top_p), point).unwrap();
        assert_eq!([0.0, 0.49, 0.51, 0.79, 0.81, 0.999].map(|p| at(1.0, p)), [1, 1, 2, 2, 0, 0]);
        // Of 0.7 of the probability the nucleus needs two tokens, 0.8 in all.
        assert_eq!([0.0, 0.62, 0.63, 0.999].map(|p| at(0.7, p)), [1, 1, 2, 2]);
        assert_eq!([0.0, 0.999].map(|p| at(0.4, p)), [1, 1]);
        // A low temperature sharpens: 0.25 to 0.09 to 0.04 at one half.
        assert_eq!(draw(&logits, sampling(0.5, 1.0), 0.6), Some(1));
        assert_eq!(draw(&logits, sampling(0.5, 1.0), 0.7), Some(2));
    }

    #[test]
    fn refuses_what_has_no_order() {
        assert_eq!(draw(&[1.0, f32::NAN], sampling(1.0, 1.0), 0.5), None);
        assert_eq!(draw(&[1.0, f32::INFINITY], sampling(1.0, 1.0), 0.5), None);
        assert_eq!(draw(&[1.0, f32::NEG_INFINITY], sampling(1.0, 1.0), 0.99), Some(0));
        for (t, p) in
            [(-1.0, 1.0), (f32::NAN, 1.0), (f32::INFINITY, 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, f32::NAN)]
        {
            assert!(Sampler::new(sampling(t, p)).is_err(), "{t} {p}");
        }
    }

    #[test]
    fn same_seed_same_tokens() {
        let logits = Array::from_slice(&[0.1f32, 0.4, 0.2, 0.3], &[4]);
        let tokens = |seed| {
            let mut sampler = Sampler::new(Sampling { seed, ..sampling(1.0, 1.0) }).unwrap();
            (0..32).map(|_| sampler.pick(&logits).unwrap().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(tokens(1), tokens(1));
        assert_ne!(tokens(1), tokens(2));
        let mut zero = Sampler::new(sampling(0.0, 1.0)).unwrap();
        assert_eq!(zero.pick(&logits).unwrap(), Some(1));
        assert_eq!(zero.pick(&Array::from_slice(&[0.0f32, f32::NAN], &[2])).unwrap(), None);
    }
}
