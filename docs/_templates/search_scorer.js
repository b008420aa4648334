// Ranks a page by the share of the query's words in its title, then as Sphinx does.
var Scorer = {
  score: ([, title, , , score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = splitQuery(query.toLowerCase()).filter((word) => word.length > 1);
    const named = words.filter((word) => title.toLowerCase().includes(word));
    return score + (20 * named.length) / Math.max(words.length, 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
