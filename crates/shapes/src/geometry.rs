//! Ideal shapes, for the renderer and the verifier alike.

use crate::Shape;

/// The half height of an equal-area square, in circle radii: sqrt(pi) / 2.
const SQUARE_HALF_SIDE: f32 = 0.886_226_9;

/// The circumradius of an equal-area equilateral triangle, in circle radii: sqrt(4 pi / (3 sqrt 3)).
const TRIANGLE_CIRCUMRADIUS: f32 = 1.555_120_3;

/// sqrt(3) / 2.
const SIN_60: f32 = 0.866_025_4;

/// How far a shape reaches from its centroid, in pixels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    /// Towards smaller and larger x alike: all shapes are mirror-symmetric.
    pub side: f32,
    /// Towards smaller y.
    pub up: f32,
    /// Towards larger y.
    pub down: f32,
}

impl Shape {
    /// The extent of a shape that has the area of a circle of `radius`.
    pub(crate) fn extent(self, radius: f32) -> Extent {
        let (side, up, down) = match self {
            Self::Circle => (1.0, 1.0, 1.0),
            Self::Square => (SQUARE_HALF_SIDE, SQUARE_HALF_SIDE, SQUARE_HALF_SIDE),
            Self::Triangle => (TRIANGLE_CIRCUMRADIUS * SIN_60, TRIANGLE_CIRCUMRADIUS, TRIANGLE_CIRCUMRADIUS / 2.0),
        };
        Extent { side: side * radius, up: up * radius, down: down * radius }
    }

    /// The share of a pixel covered by the shape, in [0, 1], anti-aliased.
    ///
    /// `(x, y)` is the pixel's centre seen from the centroid, in pixels; `radius` is that of the circle of the same area.
    ///
    /// ```text
    /// coverage = clamp(1/2 - d, 0, 1)      d = signed distance to the outline, negative inside
    /// ```
    ///
    /// The distance of the polygons is the largest of the distances to their sides, so their corners stay sharp.
    pub(crate) fn coverage(self, x: f32, y: f32, radius: f32) -> f32 {
        let distance = match self {
            Self::Circle => (x * x + y * y).sqrt() - radius,
            Self::Square => x.abs().max(y.abs()) - SQUARE_HALF_SIDE * radius,
            Self::Triangle => {
                let inradius = TRIANGLE_CIRCUMRADIUS / 2.0 * radius;
                y.max(SIN_60 * x.abs() - 0.5 * y) - inradius
            }
        };
        (0.5 - distance).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_equal_area_and_their_centroid_at_the_origin() {
        let radius = 12.3f32;
        let ideal = std::f32::consts::PI * radius * radius;
        for shape in Shape::ALL {
            let (mut area, mut sum_x, mut sum_y) = (0.0f32, 0.0, 0.0);
            for row in -30..30 {
                for column in -30..30 {
                    let (x, y) = (column as f32 + 0.5, row as f32 + 0.5);
                    let coverage = shape.coverage(x, y, radius);
                    area += coverage;
                    sum_x += coverage * x;
                    sum_y += coverage * y;
                }
            }
            assert!((area / ideal - 1.0).abs() < 0.005, "{shape}: area {area}, ideal {ideal}");
            assert!(sum_x.abs() / area < 1e-3, "{shape}: centroid x {}", sum_x / area);
            assert!(sum_y.abs() / area < 0.05, "{shape}: centroid y {}", sum_y / area);
        }
    }
}
